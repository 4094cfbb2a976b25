"""From EngineCoreOutputs to RequestOutput: detokenizing, stop strings, log-probabilities, vectors, and roots."""
