"""What schemathesis has to be told about bodies that are not JSON."""

import schemathesis


@schemathesis.serializer("application/x-ndjson")
def ndjson(ctx, value):
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
