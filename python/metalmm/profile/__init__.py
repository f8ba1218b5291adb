"""Profile logs of an inference engine: read, summed up, made into the shapes that the benchmark takes. docs/decide.md walks through it."""
