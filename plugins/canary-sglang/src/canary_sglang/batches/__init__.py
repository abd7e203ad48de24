"""What a forward of SGLang reads and writes, as views."""
