"""Models composed from a spec. Nothing in this package makes a collective call itself."""
