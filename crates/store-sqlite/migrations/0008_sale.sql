-- Sale: products and who bought them. Times are microseconds since 1970, UTC. Ids are never used again.
CREATE TABLE products (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    sku           TEXT    NOT NULL UNIQUE,
    product_name  TEXT    NOT NULL,
    initial_stock INTEGER NOT NULL CHECK (initial_stock > 0),
    start_time    INTEGER NOT NULL,
    end_time      INTEGER NOT NULL CHECK (end_time > start_time),
    state         TEXT    NOT NULL DEFAULT 'UPCOMING' CHECK (state IN ('UPCOMING', 'ACTIVE', 'ENDED')),
    end_reason    TEXT    CHECK (end_reason IN ('SOLD_OUT', 'TIME_EXPIRED')),
    sold          INTEGER NOT NULL DEFAULT 0 CHECK (sold BETWEEN 0 AND initial_stock),
    created_at    INTEGER NOT NULL,
    created_by    TEXT    NOT NULL,
    updated_at    INTEGER, -- NULL: never modified
    updated_by    TEXT
);
CREATE INDEX products_state_start ON products (state, start_time);
CREATE INDEX products_state_end ON products (state, end_time);

CREATE TABLE purchases (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    product_id   INTEGER NOT NULL REFERENCES products (id),
    user_id      TEXT    NOT NULL,
    number       INTEGER NOT NULL, -- counts the product's purchases, from 1
    purchased_at INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,
    created_by   TEXT    NOT NULL,
    updated_at   INTEGER,
    updated_by   TEXT,
    CONSTRAINT uq_product_user UNIQUE (product_id, user_id)
);
CREATE INDEX idx_purchases_product_id ON purchases (product_id, purchased_at);
CREATE INDEX idx_purchases_user_id ON purchases (user_id, purchased_at);
