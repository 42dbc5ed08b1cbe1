mod prepare;

fn main() {}
