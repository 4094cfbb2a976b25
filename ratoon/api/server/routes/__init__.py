"""The routes, a file for each group. A route only reads its body, calls the engine and builds the answer."""
