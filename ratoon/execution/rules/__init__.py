"""Rules over the next token, one file each. A rule is immutable: it sees the tokens so far and says what may follow."""
