-- Sale: products and who bought them.
CREATE TABLE products (
    id            bigint       GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sku           varchar(64)  COLLATE "C" NOT NULL UNIQUE,
    product_name  varchar(255) NOT NULL,
    initial_stock integer      NOT NULL CHECK (initial_stock > 0),
    start_time    timestamptz  NOT NULL,
    end_time      timestamptz  NOT NULL,
    state         varchar(20)  COLLATE "C" NOT NULL DEFAULT 'UPCOMING' CHECK (state IN ('UPCOMING', 'ACTIVE', 'ENDED')),
    end_reason    varchar(20)  CHECK (end_reason IN ('SOLD_OUT', 'TIME_EXPIRED')),
    sold          integer      NOT NULL DEFAULT 0 CHECK (sold BETWEEN 0 AND initial_stock),
    created_at    timestamptz  NOT NULL DEFAULT now(),
    created_by    varchar(255) NOT NULL,
    updated_at    timestamptz, -- NULL: never modified
    updated_by    varchar(255),
    CONSTRAINT valid_time_range CHECK (end_time > start_time)
) WITH (fillfactor = 50);
CREATE INDEX products_state_start ON products (state, start_time);
CREATE INDEX products_state_end ON products (state, end_time);

CREATE TABLE purchases (
    id           bigint       GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    product_id   bigint       NOT NULL REFERENCES products (id),
    user_id      varchar(255) COLLATE "C" NOT NULL,
    number       integer      NOT NULL, -- counts the product's purchases, from 1
    purchased_at timestamptz  NOT NULL,
    created_at   timestamptz  NOT NULL DEFAULT now(),
    created_by   varchar(255) NOT NULL,
    updated_at   timestamptz,
    updated_by   varchar(255),
    CONSTRAINT uq_product_user UNIQUE (product_id, user_id)
);
CREATE INDEX idx_purchases_product_id ON purchases (product_id, purchased_at);
CREATE INDEX idx_purchases_user_id ON purchases (user_id, purchased_at);
