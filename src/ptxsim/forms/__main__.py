"""`python -m ptxsim.forms [FILE]`: the tables, or FILE with its tables renewed."""

import sys
from pathlib import Path

from ptxsim.forms import CHAPTERS, markdown

BEGIN, END = "<!-- forms: begin -->\n", "<!-- forms: end -->"


def renewed(text: str) -> str:
    """The document with the tables between the marks replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{markdown(CHAPTERS)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(renewed(path.read_text()))
    else:
        sys.stdout.write(markdown(CHAPTERS))
