"""What commands write: figures, tables, pictures, wandb. Imports no other room of `app`."""
