"""Quality of bounded and compressed sessions: perplexity, and recall of hidden facts."""
