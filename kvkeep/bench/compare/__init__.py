"""`kvkeep bench`: kvkeep beside what people would pick instead, in one run."""
