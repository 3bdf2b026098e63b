//! Serving the sale page, whether it was built or not. Its content is tested in `web/`.

use crate::fixtures::{Running, Store};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_has_a_strict_policy_and_serves_only_its_own_folder() {
    let running = Running::start(Store::Embedded).await;
    let client = running.client();
    let bare = client.get("/sale?sku=W").await.unwrap();
    assert_eq!((bare.status, bare.header("location")), (308, Some("/sale/?sku=W")));
    let page = client.get("/sale/").await.unwrap();
    assert_eq!((page.status, page.header("cache-control")), (200, Some("no-cache")));
    let policy = page.header("content-security-policy").unwrap();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self'") && !policy.contains("unsafe"),
        "{policy}"
    );
    let html = String::from_utf8(page.body.to_vec()).unwrap();
    assert!(html.contains("</html>"), "{html}");
    for asset in html.split("\"./").skip(1).filter_map(|rest| rest.split('"').next()) {
        let asset = client.get(&format!("/sale/{asset}")).await.unwrap();
        assert_eq!(asset.status, 200);
        assert!(asset.header("cache-control").unwrap().contains("immutable"));
        assert_eq!(asset.header("x-content-type-options"), Some("nosniff"));
    }
    let is_missing = html.contains("npm run build");
    assert_ne!(is_missing, html.contains("assets/"), "either the page, or how to build it");
    for path in ["/sale/..%2fCargo.toml", "/sale/assets/nothing.js", "/sale/assets/..%2findex.html"] {
        assert_eq!(client.get(path).await.unwrap().status, 404, "{path}");
    }
}
