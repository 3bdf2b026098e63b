-- Whether an operator has ended the sale (1). Its end_reason is TIME_EXPIRED then, as in Postgres.
ALTER TABLE products ADD COLUMN ended_by_operator INTEGER;
