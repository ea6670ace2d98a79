"""Tests of the records that flow between the stages, and of every check on user input."""
