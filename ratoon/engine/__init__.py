"""EngineCore and its clients, input and output processing, detokenizing."""
