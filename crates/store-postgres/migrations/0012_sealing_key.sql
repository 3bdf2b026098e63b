-- Registered keys by name and digest: two servers may have different keys of one name, and neither registration may hide the
-- other. `request_key` stays for servers of the version before, which register there.
CREATE TABLE sealing_key (
    name          text COLLATE "C" NOT NULL,
    digest        text COLLATE "C" NOT NULL,
    check_value   bytea            NOT NULL,
    registered_at timestamptz      NOT NULL,
    PRIMARY KEY (name, digest)
);
INSERT INTO sealing_key (name, digest, check_value, registered_at)
SELECT name, digest, check_value, registered_at FROM request_key;
