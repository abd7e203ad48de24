"""What tests do to an engine and ask of it: traffic, corruption of each sort, and what was told. Most functions here
run in the engine's process, where `engines.driver` calls them by name."""
