"""What a running engine's guard comes to, as numbers for Prometheus and OpenTelemetry."""
