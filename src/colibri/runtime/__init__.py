"""The C core behind Python: Engine (a model) and Session (one timeline)."""
