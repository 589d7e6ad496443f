"""Models composed from a spec. Nothing in this room makes a collective call itself."""
