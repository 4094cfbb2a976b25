"""The text of an answer, split into reasoning, content and tool calls while it is generated."""
