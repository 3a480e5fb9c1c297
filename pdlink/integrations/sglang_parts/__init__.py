"""The parts of the SGLang integration."""
