"""The verifier: holds an implementation's rules against the facts and returns every refusal."""
