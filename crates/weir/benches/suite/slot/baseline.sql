-- The baseline of slot: one event a transaction, all of it in one call, so that a client makes one round trip.
-- What an application would keep in memory or can work out by itself, the pace and the random milliseconds, it is given.

-- How many slots the window has, now locked for this transaction; NULL when somebody else holds it.
CREATE FUNCTION try_lock_window(in_config_name text, in_window timestamptz) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    found_count integer;
BEGIN
    SELECT slot_count INTO found_count FROM rate_limit_window_counter
    WHERE config_name = in_config_name AND window_start = in_window FOR UPDATE NOWAIT;
    IF NOT FOUND THEN
        BEGIN
            INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
            VALUES (in_config_name, in_window, 0, 'OPEN');
            RETURN 0;
        EXCEPTION WHEN unique_violation THEN
            NULL; -- somebody else was first, and has committed by now
        END;
        SELECT slot_count INTO found_count FROM rate_limit_window_counter
        WHERE config_name = in_config_name AND window_start = in_window FOR UPDATE NOWAIT;
    END IF;
    RETURN found_count;
EXCEPTION WHEN lock_not_available THEN
    RETURN NULL;
END $$;

-- The first open window after this one, by the index of status and time; past the last one when all are full.
CREATE FUNCTION find_first_open_window(in_config_name text, in_window timestamptz, in_window_size interval)
RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
    found_window timestamptz;
BEGIN
    SELECT window_start INTO found_window FROM rate_limit_window_counter
    WHERE config_name = in_config_name AND status = 'OPEN' AND window_start > in_window
    ORDER BY window_start LIMIT 1;
    IF NOT FOUND THEN
        SELECT window_start + in_window_size INTO found_window FROM rate_limit_window_counter
        WHERE config_name = in_config_name ORDER BY window_start DESC LIMIT 1;
    END IF;
    RETURN found_window;
END $$;

-- The slot and the counter of its window, which is locked.
CREATE FUNCTION claim_slot_in_window(
    in_event_id text, in_config_name text, in_requested_time timestamptz,
    in_window timestamptz, in_jitter_ms integer, in_slot_count integer, in_max_per_window integer
) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rate_limit_event_slot (event_id, config_name, requested_time, window_start, scheduled_time)
    VALUES (in_event_id, in_config_name, in_requested_time, in_window,
            in_window + in_jitter_ms * interval '1 millisecond');
    UPDATE rate_limit_window_counter
    SET slot_count = in_slot_count + 1,
        status = CASE WHEN in_slot_count + 1 >= in_max_per_window THEN 'CLOSED' ELSE 'OPEN' END
    WHERE config_name = in_config_name AND window_start = in_window;
    RETURN 'NEW';
EXCEPTION WHEN unique_violation THEN
    RETURN 'EXISTING';
END $$;

CREATE FUNCTION assign_slot(
    in_event_id text, in_config_name text, in_requested_time timestamptz,
    in_window_start timestamptz, in_window_size interval, in_max_per_window integer,
    in_effective_max integer, in_first_jitter_ms integer, in_full_jitter_ms integer, in_headroom integer
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    current_window timestamptz := in_window_start;
    search_limit timestamptz;
    found_count integer;
BEGIN
    PERFORM FROM rate_limit_event_slot WHERE event_id = in_event_id;
    IF FOUND THEN
        RETURN 'EXISTING';
    END IF;
    -- The first window, which offers the share of its places that the rest of its time is worth.
    found_count := try_lock_window(in_config_name, current_window);
    IF found_count < in_effective_max THEN
        RETURN claim_slot_in_window(in_event_id, in_config_name, in_requested_time,
                                    current_window, in_first_jitter_ms, found_count, in_max_per_window);
    END IF;
    -- From the first open one on, passing over what others hold.
    current_window := find_first_open_window(in_config_name, in_window_start, in_window_size);
    search_limit := current_window + in_headroom * in_window_size;
    WHILE current_window <= search_limit LOOP
        found_count := try_lock_window(in_config_name, current_window);
        IF found_count < in_max_per_window THEN
            RETURN claim_slot_in_window(in_event_id, in_config_name, in_requested_time,
                                        current_window, in_full_jitter_ms, found_count, in_max_per_window);
        END IF;
        current_window := current_window + in_window_size;
    END LOOP;
    RETURN 'EXHAUSTED';
END $$;
