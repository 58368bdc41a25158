"""The paper's experiments: a frozen spec -> runs -> records -> a summary. fsla.plots draws the records."""
