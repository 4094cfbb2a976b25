"""From what a caller gives to an EngineCoreRequest: prompts, parameters, and the checks on both."""
