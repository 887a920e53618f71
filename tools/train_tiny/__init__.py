"""How models/twinpane-tiny is made: grammars, tokenizer, model, training, export. See docs/twinpane-tiny.md."""
