"""The protocol as data: what requests may say and what answers look like. Requests are checked against these models;
answers are built as plain objects, and their models are what the OpenAPI document and the tests hold them to."""
