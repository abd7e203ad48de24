"""SGLang's prefix caches, walked and swept."""
