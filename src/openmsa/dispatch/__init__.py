"""Which kernel runs where, and why: facts, offers, the table, and the choice."""
