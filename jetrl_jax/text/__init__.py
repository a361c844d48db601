"""Text and tokens: tokenizers, answers and numbers in completions."""
