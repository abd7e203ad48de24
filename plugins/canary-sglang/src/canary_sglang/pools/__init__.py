"""SGLang's pools as regions, and the listeners that add their tables to a view."""
