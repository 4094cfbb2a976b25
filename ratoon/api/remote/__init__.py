"""The client side: talking to an OpenAI-compatible server, ours or another's. Knows nothing of models or engines."""
