"""The OpenAI-compatible HTTP server over an AsyncLLM: app.py puts it together, runner.py runs it as a program."""
