-- Whether an operator has ended the sale. Its end_reason is TIME_EXPIRED then, which the version before can read.
ALTER TABLE products ADD COLUMN ended_by_operator boolean;
