"""What people touch: the LLM class and the command line."""
