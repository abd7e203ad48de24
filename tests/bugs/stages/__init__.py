"""The engines of the museum under guard, one file each; importing one imports no engine."""
