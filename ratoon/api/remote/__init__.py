"""A client of OpenAI-compatible servers, Ratoon or others. Independent of models and engines."""
