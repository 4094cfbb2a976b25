"""Readers of rows: for each kind of request, which rows of a step it reads and what it makes of them."""
