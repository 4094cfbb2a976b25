"""Model declarations, their registry, and where configs, weights, tokenizers and chat templates come from."""
