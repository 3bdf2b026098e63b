//! Checks the canonical form of generated values: however a value is written it has one form, and no other value has
//! that form.

use std::collections::BTreeMap;

use proptest::prelude::*;
use weir_core::RequestType;
use weir_core::request::canonical::{CanonicalJson, Fingerprint};

/// A JSON value, independent of its spelling. Numbers are `mantissa` × 10^`exponent`; the mantissa is not divisible by
/// ten, so that equal numbers are equal here.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Json {
    Null,
    Bool(bool),
    Number(i64, i32),
    Text(String),
    Array(Vec<Self>),
    Object(BTreeMap<String, Self>),
}

fn number(mut mantissa: i64, mut exponent: i32) -> Json {
    while mantissa != 0 && mantissa % 10 == 0 {
        mantissa /= 10;
        exponent += 1;
    }
    Json::Number(mantissa, if mantissa == 0 { 0 } else { exponent })
}

/// Short texts of characters that can be escaped in several ways and that sort differently by UTF-16 unit and code
/// point.
fn text() -> impl Strategy<Value = String> {
    let character = prop_oneof![
        3 => prop::char::range('a', 'c'),
        1 => prop::sample::select(vec!['"', '\\', '/', '\n', '\0', '\u{1f}', '\u{7f}', 'é', '€', '\u{fb33}', '😀']),
    ];
    prop::collection::vec(character, 0..4).prop_map(String::from_iter)
}

fn json() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::Bool),
        (-20_i64..20, -2_i32..3).prop_map(|(mantissa, exponent)| number(mantissa, exponent)),
        (any::<i64>(), -40_i32..40).prop_map(|(mantissa, exponent)| number(mantissa, exponent)),
        text().prop_map(Json::Text),
    ];
    leaf.prop_recursive(5, 40, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Json::Array),
            prop::collection::btree_map(text(), inner, 0..5).prop_map(Json::Object),
        ]
    })
}

/// An endless sequence of random choices of spelling.
struct Spelling<'a> {
    choices: std::iter::Cycle<std::slice::Iter<'a, u8>>,
}

impl<'a> Spelling<'a> {
    fn new(choices: &'a [u8]) -> Self {
        Self { choices: choices.iter().cycle() }
    }

    fn choose(&mut self, of: usize) -> usize {
        usize::from(*self.choices.next().unwrap()) % of
    }

    fn pick(&mut self, of: &[&'static str]) -> &'static str {
        of.get(self.choose(of.len())).unwrap()
    }

    fn space(&mut self) -> &'static str {
        self.pick(&["", " ", "\n\t", "\r\n  "])
    }

    fn spell(&mut self, json: &Json) -> String {
        let (before, after) = (self.space(), self.space());
        let value = match json {
            Json::Null => "null".to_owned(),
            Json::Bool(value) => value.to_string(),
            Json::Number(mantissa, exponent) => self.spell_number(*mantissa, *exponent),
            Json::Text(text) => self.spell_text(text),
            Json::Array(items) => {
                let items: Vec<_> = items.iter().map(|item| self.spell(item)).collect();
                format!("[{}{}]", items.join(","), if items.is_empty() { self.space() } else { "" })
            }
            Json::Object(fields) => {
                let mut fields: Vec<_> = fields
                    .iter()
                    .map(|(name, value)| {
                        let (name, gap) = (self.spell_text(name), self.space());
                        format!("{gap}{name}{gap}:{}", self.spell(value))
                    })
                    .collect();
                let turn = self.choose(fields.len().max(1));
                fields.rotate_left(turn);
                if self.choose(2) == 0 {
                    fields.reverse();
                }
                format!("{{{}}}", fields.join(","))
            }
        };
        format!("{before}{value}{after}")
    }

    /// Moves the decimal point and adjusts the exponent.
    fn spell_number(&mut self, mantissa: i64, exponent: i32) -> String {
        let sign = if mantissa < 0 || (mantissa == 0 && self.choose(2) == 0) { "-" } else { "" };
        let digits = format!(
            "{}{}",
            mantissa.unsigned_abs(),
            "0".repeat(if mantissa == 0 { 0 } else { self.choose(4) })
        );
        let padding = i32::try_from(digits.len() - mantissa.unsigned_abs().to_string().len()).unwrap();
        let exponent = exponent - padding;
        let e = self.pick(&["e", "E"]);
        let plus = |n: i32, plus: &str| if n < 0 { n.to_string() } else { format!("{plus}{n:02}") };
        match self.choose(3) {
            0 if exponent == 0 => format!("{sign}{digits}"),
            1 => {
                let moved = exponent + i32::try_from(digits.len()).unwrap();
                format!("{sign}0.{digits}{e}{}", plus(moved, "+"))
            }
            2 if digits.len() > 1 => {
                let (first, others) = digits.split_at(1);
                let moved = exponent + i32::try_from(others.len()).unwrap();
                format!("{sign}{first}.{others}{e}{}", plus(moved, ""))
            }
            _ => format!("{sign}{digits}{e}{}", plus(exponent, "")),
        }
    }

    fn spell_text(&mut self, text: &str) -> String {
        let spelled = text.chars().map(|character| match character {
            '"' | '\\' if self.choose(2) == 0 => format!("\\{character}"),
            '/' if self.choose(2) == 0 => "\\/".to_owned(),
            '\n' if self.choose(2) == 0 => "\\n".to_owned(),
            '"' | '\\' | '\0'..='\u{1f}' => self.escape(character),
            _ if self.choose(3) == 0 => self.escape(character),
            _ => character.to_string(),
        });
        format!("\"{}\"", spelled.collect::<String>())
    }

    fn escape(&mut self, character: char) -> String {
        let is_upper = self.choose(2) == 0;
        let units = character.encode_utf16(&mut [0; 2]).to_vec();
        let hex = |unit: u16| if is_upper { format!("\\u{unit:04X}") } else { format!("\\u{unit:04x}") };
        units.into_iter().map(hex).collect()
    }
}

fn canonical(spelled: &str) -> CanonicalJson {
    CanonicalJson::parse(spelled.as_bytes()).unwrap_or_else(|error| panic!("{spelled}: {error}"))
}

fn spellings() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn a_value_has_one_form_however_it_is_spelled(value in json(), one in spellings(), other in spellings()) {
        let (one, other) = (Spelling::new(&one).spell(&value), Spelling::new(&other).spell(&value));
        let form = canonical(&one);
        prop_assert_eq!(&form, &canonical(&other), "{} and {}", one, other);
        prop_assert_eq!(&form, &canonical(form.as_str()), "the form of a form is itself");
        let kind = RequestType::parse("charge").unwrap();
        prop_assert_eq!(Fingerprint::new(&kind, &form), Fingerprint::new(&kind, &canonical(&other)));
    }

    #[test]
    fn different_values_have_different_forms(a in json(), b in json(), spelling in spellings()) {
        let (form_a, form_b) = (canonical(&Spelling::new(&spelling).spell(&a)), canonical(&Spelling::new(&[0]).spell(&b)));
        prop_assert_eq!(a == b, form_a == form_b, "{} {}", form_a.as_str(), form_b.as_str());
        let kind = RequestType::parse("charge").unwrap();
        prop_assert_eq!(a == b, Fingerprint::new(&kind, &form_a) == Fingerprint::new(&kind, &form_b));
    }

    /// Two values that differ in one element, which two random values hardly ever do.
    #[test]
    fn a_small_difference_is_a_difference(values in prop::collection::vec(json(), 1..5), place in 0_usize..5, other in json()) {
        let mut changed = values.clone();
        let place = place % values.len();
        changed[place] = other;
        let form = |values: Vec<Json>| canonical(&Spelling::new(&[1, 3, 2]).spell(&Json::Array(values)));
        prop_assert_eq!(values == changed, form(values) == form(changed));
    }

    #[test]
    fn a_type_is_part_of_the_fingerprint(a in "[a-c\"\\\\,:{}]{1,4}", b in "[a-c\"\\\\,:{}]{1,4}", value in json()) {
        let form = canonical(&Spelling::new(&[0]).spell(&value));
        let fingerprint = |kind: &str| Fingerprint::new(&RequestType::parse(kind).unwrap(), &form);
        prop_assert_eq!(a == b, fingerprint(&a) == fingerprint(&b));
    }

    /// No input makes the parser panic.
    #[test]
    fn no_input_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), json in "[\\[\\]{}\",:\\\\u0-9eE.+ -]{0,60}") {
        let _ = CanonicalJson::parse(&bytes);
        if let Ok(form) = CanonicalJson::parse(json.as_bytes()) {
            prop_assert_eq!(CanonicalJson::parse(form.as_str().as_bytes()), Ok(form));
        }
    }
}
