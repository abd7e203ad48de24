"""Figures of a running engine's guard, for Prometheus and OpenTelemetry."""
