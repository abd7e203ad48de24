"""Slots handed out and taken back by SGLang's allocators, with their requests."""
