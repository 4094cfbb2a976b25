"""Building blocks of models: linear, norm, rotary embedding, embedding, sampling ops. Imports only core."""
