"""Tables, figures and benchmarks, one function per table or figure."""
