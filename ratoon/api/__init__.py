"""The user interface: the LLM class, the command line and the server."""
