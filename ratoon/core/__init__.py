"""The shared vocabulary: params, requests, the step plan, outputs, config, errors. Imports nothing of ours."""
