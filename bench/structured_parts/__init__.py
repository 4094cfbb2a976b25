"""Parts of structured.py: schemas, and measurements of grammar libraries."""
