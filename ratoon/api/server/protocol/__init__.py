"""The protocol as data: the fields of requests and answers. Requests are checked against these models;
answers are built as plain objects; their models are for the OpenAPI document and the tests."""
