"""The routes, a file for each group. A route reads its body, asks the engine and shapes the answer; no more."""
