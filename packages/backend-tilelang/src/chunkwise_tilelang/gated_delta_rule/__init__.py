"""The gated delta rule on TileLang."""
