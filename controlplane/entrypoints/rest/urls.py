"""The admin API, relative to ``/api/v1/``."""

from django.urls import URLPattern, path

from controlplane.entrypoints.rest.views import audit, catalog, fleet, session, tenants

urlpatterns: list[URLPattern] = [
    path("session/", session.Session.as_view()),
    path("status/", session.Status.as_view()),
    path("tickets/", tenants.Tickets.as_view()),
    path("tenants/", tenants.Tenants.as_view()),
    path("tenants/<str:tenant_id>/", tenants.Tenant.as_view()),
    path("tenants/<str:tenant_id>/suspend/", tenants.TenantSuspension.as_view()),
    path("tenants/<str:tenant_id>/resume/", tenants.TenantResumption.as_view()),
    path("tenants/<str:tenant_id>/budget/", tenants.Budget.as_view()),
    path("tenants/<str:tenant_id>/keys/", tenants.Keys.as_view()),
    path("tenants/<str:tenant_id>/keys/<str:key_id>/", tenants.Key.as_view()),
    path("models/", catalog.Models.as_view()),
    path("models/<str:name>/", catalog.Model.as_view()),
    path("models/<str:name>/access/", catalog.ModelAccess.as_view()),
    path("models/<str:name>/aliases/", catalog.Aliases.as_view()),
    path("models/<str:name>/aliases/<str:alias>/", catalog.Alias.as_view()),
    path("models/<str:name>/versions/", catalog.Versions.as_view()),
    path("models/<str:name>/versions/<str:version>/", catalog.Version.as_view()),
    path("models/<str:name>/versions/<str:version>/retire/", catalog.VersionRetirement.as_view()),
    path("models/<str:name>/versions/<str:version>/scale/", catalog.VersionScale.as_view()),
    path("models/<str:name>/versions/<str:version>/price/", catalog.VersionPrice.as_view()),
    path("models/<str:name>/versions/<str:version>/default/", catalog.DefaultVersion.as_view()),
    path("routes/", catalog.Routes.as_view()),
    path("routes/<str:name>/", catalog.Route.as_view()),
    path("nodes/", fleet.Nodes.as_view()),
    path("nodes/<str:node_id>/", fleet.Node.as_view()),
    path("nodes/<str:node_id>/drain/", fleet.NodeDrain.as_view()),
    path("nodes/<str:node_id>/undrain/", fleet.NodeUndrain.as_view()),
    path("placements/", fleet.Placements.as_view()),
    path("decisions/", fleet.Decisions.as_view()),
    path("decisions/<str:decision_id>/", fleet.Decision.as_view()),
    path("events/", audit.Events.as_view()),
    path("requests/", audit.Requests.as_view()),
    path("requests/<str:request_id>/", audit.InferenceRequest.as_view()),
    path("exports/audit/", audit.AuditExport.as_view()),
    path("apply/", catalog.Apply.as_view()),
]
