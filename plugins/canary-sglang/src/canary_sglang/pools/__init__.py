"""SGLang's pools as regions."""
