"""Takes recorded spans to a collector, by either protocol of OTLP. Imported only where one is named."""
